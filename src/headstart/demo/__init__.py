"""The demonstration: a long document, six questions and a chat, with and without the cache."""
