"""Everything Headstart raises, as one tree.

    HeadstartError
    ├── ConfigError            a setting or an argument is wrong; also a ValueError
    ├── TierUnavailableError   a medium cannot be opened; also an OSError
    │   └── RootLockedError    another process owns the directory or device
    ├── ClosedError            the store or tier was closed; also a ValueError
    └── UnsupportedModelError  the engine cannot cache this model

A miss is a value, never an exception: damage, a full tier and failing I/O are answered with an
`Outcome`. An exception means that the operator must act (its message says what is wrong, what is
allowed and what to do next) or that the caller has a bug.
"""

from __future__ import annotations


class HeadstartError(Exception):
    """Base of all errors of this package."""


class ConfigError(HeadstartError, ValueError):
    """A setting or an argument is outside what is allowed."""


class TierUnavailableError(HeadstartError, OSError):
    """A tier's medium cannot be opened or prepared."""


class RootLockedError(TierUnavailableError):
    """Another process owns the tier's directory or device."""


class ClosedError(HeadstartError, ValueError):
    """The object was used after `close()`."""


class UnsupportedModelError(HeadstartError):
    """The engine cannot cache this model; the message names the feature in the way."""
