"""Dropout that drops the same elements in every layout, for comparing layouts and for finding
errors: it costs time.

Whether an element is dropped is a hash of what it is (its sample's content, position and channel,
the module, the step; ``keys.py``) instead of the next number of a stream, whose order depends on
the layout. ``keyed.py`` puts that in the place of torch's dropout."""

from lightning_ptdp.keyed_dropout.keyed import KeyedDropout, KeyedDropoutError

__all__ = ["KeyedDropout", "KeyedDropoutError"]
