"""Strategies for what is in entries.

Not in `support.wire`, which services of tests import: with Hypothesis each would be larger, and fork slower.
"""

from __future__ import annotations

from hypothesis import strategies as st

from carpool.keys import CORRELATION_ID
from carpool.messages.requests import CONTENT_TYPES

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)  # without lone surrogates
names = st.from_regex(CORRELATION_ID, fullmatch=True)
request_maps = st.fixed_dictionaries(
    {"correlation_id": names, "body": st.binary(max_size=20)},
    optional={
        "content_type": st.sampled_from(CONTENT_TYPES),
        "reply_to": names,
        "expiration": st.integers(1, 10**9),
        "priority": st.integers(0, 9),
        "lane": texts,
        "cost": st.integers(0, 1 << 40),
        "tenant": names,
        "reply_columns": st.integers(0, 1),
        "stream": st.integers(0, 1),
    },
)
