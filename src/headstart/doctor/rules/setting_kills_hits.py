"""A setting with which nothing hits, and without which it does.

hit rate with one value = 0, with another > 10 %, nothing else differs
"""

from __future__ import annotations

from collections.abc import Iterator

from headstart.doctor.arms import alike, differs, hit_share, hitting, ratio
from headstart.doctor.facts import Known, say
from headstart.doctor.findings import Cause, Fix, Rule, Sign, Strength

_NONE = 0.02
_SOME = 0.1
_WORDS = ("speculation", "background", "routing")


def find(known: Known) -> Iterator[Sign]:
    """Two arms that differ in one setting."""
    for dead in hitting(known):
        rate = hit_share(dead)
        if rate is None or rate > _NONE:
            continue
        for alive in hitting(known):
            other = hit_share(alive)
            keys = [key for key in _WORDS if differs(dead, alive, key)]
            if other is None or other <= _SOME or len(keys) != 1:
                continue
            if alike(dead, alive, but=keys[0]):
                yield Sign(
                    strength=Strength.COMPUTED,
                    margin=ratio(other, _SOME),
                    share=other,
                    evidence=(
                        say(
                            f"{{dead.hit_rate}} hit with {keys[0]} {{dead.{keys[0]}}}, "
                            f"{{alive.hit_rate}} with {{alive.{keys[0]}}}",
                            dead=dead,
                            alive=alive,
                        ),
                    ),
                )


RULE = Rule(
    name="setting_kills_hits",
    cause=Cause.CONFIGURATION,
    needs=(("arms.speculation", "arms.hit_rate"), ("arms.background", "arms.hit_rate")),
    find=find,
    fixes=(
        Fix(text="leave the setting as it is where it hits, or update: the two do not go together"),
        Fix(
            engine="vllm",
            text="with MTP or EAGLE the last block is dropped: prompts need two blocks more",
        ),
    ),
)
