"""Characters come whole, and none that is taken back."""

from hypothesis import given
from hypothesis import strategies as st

from genlm_backend.generation.text_sequence import Text

alphabet = st.text("abc é日\n", max_size=12)


@given(alphabet, st.lists(st.integers(1, 3)), st.lists(st.text("abcé日", min_size=1), max_size=3))
def test_text_ends_at_first_stop_string_however_bytes_are_split(text, sizes, stops):
    data, tracked, shown, parts = text.encode(), Text(stops), "", []
    while data:
        size = sizes.pop() if sizes else 1
        parts.append(data[:size])
        data = data[size:]
    seen = b""
    for part in parts:
        seen += part
        shown += tracked.add(part)
        assert text.startswith(shown)
        if tracked.is_stopped:
            break
    else:
        shown += tracked.end()
    # The stop string that is complete first ends it, at its earliest place.
    complete = [text.index(stop) for stop in stops if stop.encode() in seen]
    assert tracked.is_stopped == bool(complete)
    assert shown == (text[: min(complete)] if complete else text)


def test_incomplete_character_is_held_until_the_end():
    text = Text()
    first, rest = "é".encode()[:1], "é".encode()[1:]
    assert [text.add(first), text.add(rest), text.add(first), text.end()] == ["", "é", "", "\ufffd"]
