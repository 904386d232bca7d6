"""Streaming text: whole characters only, and nothing of a stop string."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dspark.engine.text import TextStream

SAMPLE = "Zürich costs 12 €, 東京 more 😀👩‍👩‍👧 — naïve café, ничего."


def byte_level() -> Tokenizer:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Words where it has them, else single bytes, as SentencePiece models do."""
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {"▁more": 256, "▁": 257, "o": 258, "s": 259, "<unk>": 260}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_deltas_join_to_the_text_and_hold_whole_characters(make, chunk):
    tokenizer = make()
    ids = tokenizer.encode(SAMPLE * 4).ids
    stream = TextStream(tokenizer.decode)
    deltas = [stream.push(ids[i : i + chunk])[1] for i in range(0, len(ids), chunk)]
    assert "".join(deltas) + stream.finish() == tokenizer.decode(ids) == stream.text == SAMPLE * 4
    assert not any("\ufffd" in delta for delta in deltas)


def test_an_unfinished_character_at_the_end_is_dropped():
    tokenizer = byte_level()
    ids = tokenizer.encode("ok 😀").ids
    stream = TextStream(tokenizer.decode)
    assert stream.push(ids[:-1]) == (len(ids) - 1, "ok ")
    assert stream.finish() == ""


def test_invalid_bytes_do_not_hold_the_text_for_ever():
    tokenizer = byte_level()
    invalid = tokenizer.token_to_id("ÿ")  # byte 0xFF
    stream = TextStream(tokenizer.decode)
    for _ in range(100):
        stream.push([invalid])
    assert stream.text == "\ufffd" * 97
    stream.push(tokenizer.encode("x").ids)
    assert stream.text == "\ufffd" * 100 + "x"


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_bytes_come_out_as_decoded_whole(data):
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    pieces = data.draw(
        st.lists(st.one_of(st.lists(st.integers(0, size - 1), max_size=5), st.sampled_from("aé東😀")), max_size=12)
    )
    ids = [i for piece in pieces for i in (tokenizer.encode(piece).ids if isinstance(piece, str) else piece)]
    stream, at = TextStream(tokenizer.decode), 0
    while at < len(ids):
        chunk = data.draw(st.integers(1, 8))
        stream.push(ids[at : at + chunk])
        at += chunk
    whole = tokenizer.decode(ids)
    assert whole.startswith(stream.text)
    assert set(whole[len(stream.text) :]) <= {"\ufffd"}
    assert len(whole) - len(stream.text) <= 3


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_stop_string_is_cut_wherever_the_rounds_fall(chunk):
    tokenizer = byte_level()
    text = "one two three four"
    ids = tokenizer.encode(text).ids
    stream = TextStream(tokenizer.decode, ("three", "w t", "our"))
    taken, deltas = 0, []
    for i in range(0, len(ids), chunk):
        count, delta = stream.push(ids[i : i + chunk])
        taken += count
        deltas.append(delta)
        if stream.stopped:
            break
    assert stream.stopped
    assert stream.text == "".join(deltas) == "one two "
    assert taken == len("one two three")


def test_text_that_may_start_a_stop_string_waits_and_comes_at_the_end():
    tokenizer = byte_level()
    stream = TextStream(tokenizer.decode, ("</end>",))
    assert stream.push(tokenizer.encode("a </en").ids) == (6, "a ")
    assert stream.push(tokenizer.encode("x").ids) == (1, "</enx")
    assert stream.push(tokenizer.encode("y</").ids) == (3, "y")
    assert stream.finish() == "</"
    assert stream.text == "a </enxy</"


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_chunks_change_nothing(data):
    tokenizer = byte_level()
    text = data.draw(st.text("ab é😀", max_size=40))
    stops = data.draw(st.lists(st.text("ab é", min_size=1, max_size=3), max_size=2))
    ids = tokenizer.encode(text).ids
    whole, parts = TextStream(tokenizer.decode, stops), TextStream(tokenizer.decode, stops)
    expected = whole.push(ids)[0]
    taken, at = 0, 0
    while at < len(ids) and not parts.stopped:
        size = data.draw(st.integers(1, 8))
        taken += parts.push(ids[at : at + size])[0]
        at += size
    whole.finish(), parts.finish()
    assert (taken, parts.text, parts.stopped) == (expected, whole.text, whole.stopped)
    ends = [text.find(stop) for stop in stops if stop in text]
    assert whole.stopped == bool(ends)
    if not ends:
        assert whole.text == text


@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize(
    ("min_tokens", "expected"), [(0, "one"), (3, "one"), (8, "one stop two"), (12, "one stop two"), (19, None)]
)
def test_stop_strings_do_not_count_before_min_tokens(step, min_tokens, expected):
    """Only tokens after the first `min_tokens` can complete one, though it may begin before."""
    text = "one stop two stop x"
    stream = TextStream(lambda ids: "".join(map(chr, ids)), (" stop", "never"), min_tokens)
    ids, given, taken = [ord(sign) for sign in text], "", 0
    for begin in range(0, len(ids), step):
        count, new = stream.push(ids[begin : begin + step])
        given, taken = given + new, taken + count
        if stream.stopped:
            break
    given += stream.finish()
    assert given == stream.text == (text if expected is None else expected)
    assert stream.stopped == (expected is not None)
    assert taken == (len(text) if expected is None else len(expected) + 5)
