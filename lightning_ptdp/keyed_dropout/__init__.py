"""Dropout that drops the same elements in every layout.

It serves to compare layouts and to find errors; it costs time.

A hash decides whether an element is dropped. Its inputs identify the element: the content of its
sample, its position and channel, the module, the step. torch uses the next number of a stream
instead, whose order depends on the layout.
"""

from lightning_ptdp.keyed_dropout.keyed import KeyedDropout, KeyedDropoutError

__all__ = ["KeyedDropout", "KeyedDropoutError"]
