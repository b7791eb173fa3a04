"""Text in and out: tokenizer, chat template, detokenisation and stop strings against the libraries they stand for."""

from __future__ import annotations

import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from forebay.engine.api.server_state import Phase, ServerState
from forebay.engine.api.text.chat_template import ChatTemplate, TemplateRefusedError
from forebay.engine.api.text.stop_strings import StopStringMatcher
from forebay.engine.api.text.tokenizer import ModelTokenizer

MESSAGES = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": "Hé, 你好!\n"},
    {"role": "assistant", "content": "  Hi  "},
    {"role": "user", "content": 'Say "x"'},
]
TEMPLATES = [
    "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
    "{%- for m in messages %}\n  {%- if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration "
    "%}"
    "\n  {%- else %}{{ m | tojson }}{% endif %}\n{%- endfor %}{{ eos_token }}",
    "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ m.content[::-1] }}|"
    "{% if loop.last %}{% break %}{% endif %}{% endfor %}{% if tools is none %}no tools{% endif %}"
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}{% endfor %}{{ ns.n "
    "}}",
]


@pytest.mark.engine
def test_templates_render_as_transformers_renders_them(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2)
    special = {name: str(value) for name, value in theirs.special_tokens_map.items() if isinstance(value, str)}
    for source in [*TEMPLATES, (smollm2 / "chat_template.jinja").read_text()]:
        options: dict[str, Any] = {"enable_thinking": False} if "enable_thinking" in source else {}
        wanted = theirs.apply_chat_template(
            MESSAGES, chat_template=source, tokenize=False, add_generation_prompt=True, **options
        )
        assert ChatTemplate(source, special).render(MESSAGES, options) == wanted
    ours = ChatTemplate.from_folder(smollm2)
    assert ours is not None
    ids = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert ModelTokenizer(smollm2).encode(ours.render(MESSAGES), add_special_tokens=False) == ids


def test_templates_are_sandboxed_and_may_refuse() -> None:
    with pytest.raises(TemplateRefusedError, match="only users"):
        ChatTemplate("{{ raise_exception('only users') }}", {}).render(MESSAGES)
    with pytest.raises(TemplateRefusedError):
        ChatTemplate("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}", {}).render(MESSAGES)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    """All bytes, some merges that cut characters in two, and two special tokens."""
    folder = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(alphabet)}
    merges = [("h", "i"), ("Ã", "©"), ("ä", "½")]
    vocab.update({a + b: len(vocab) + i for i, (a, b) in enumerate(merges)})
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<ümläut>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return ModelTokenizer(folder)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    """A SentencePiece-like vocabulary: words with a leading space mark, and bytes for the rest."""
    folder = tmp_path_factory.mktemp("fallback")
    words = ["▁", "▁hi", "▁you", "a", "b", "lo"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab.update({word: 256 + i for i, word in enumerate(words)})
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token=None))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return ModelTokenizer(folder)


def stream(codec: ModelTokenizer, tokens: list[int]) -> list[str]:
    detokenizer = codec.detokenizer()
    return [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_tokens_stream_to_the_text_they_decode_to(byte_level: ModelTokenizer, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, byte_level.vocab_size - 1), max_size=40))
    pieces = stream(byte_level, tokens)
    assert "".join(pieces) == byte_level.decode(tokens)


@given(text=st.text(max_size=40), cut=st.integers(0, 300))
@settings(max_examples=300, deadline=None)
def test_a_character_comes_out_whole_as_soon_as_its_last_byte_is_there(
    byte_level: ModelTokenizer, text: str, cut: int
) -> None:
    tokens = byte_level.encode(text, add_special_tokens=False)
    pieces = stream(byte_level, tokens)
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    shown = "".join(pieces[: cut % (len(tokens) + 1)])
    assert text.startswith(shown)
    assert "\ufffd" not in shown or "\ufffd" in text


@given(st.lists(st.sampled_from(["hi", "you", "é", "你", "👍", "a", "lo"]), max_size=20))
@settings(max_examples=200, deadline=None)
def test_other_vocabularies_stream_through_a_window(byte_fallback: ModelTokenizer, words: list[str]) -> None:
    vocab = {"hi": [257], "you": [258], "a": [259], "lo": [261]}
    tokens = [token for word in words for token in vocab.get(word, list(word.encode()))]
    pieces = stream(byte_fallback, tokens)
    assert "".join(pieces) == byte_fallback.decode(tokens)
    assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.engine
def test_smollm2_tokens_stream_like_the_tokenizer_decodes(smollm2: Path) -> None:
    codec = ModelTokenizer(smollm2)
    text = "naïve café 你好 👩‍👩‍👧 \t\n\n  def f(x): return x**2 — “quotes” 🇫🇷"
    tokens = codec.encode(text, add_special_tokens=False)
    assert "".join(stream(codec, tokens)) == text == codec.decode(tokens)
    assert "".join(stream(codec, [1, *tokens, 2])) == text
    assert b"".join(codec.token_bytes(token) for token in tokens).decode() == text
    assert codec.token_bytes(2) == b"<|im_end|>"


@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3).map(tuple),
)
@settings(max_examples=500, deadline=None)
def test_stop_strings_cut_a_stream_as_they_cut_its_text(pieces: list[str], stops: tuple[str, ...]) -> None:
    text = "".join(pieces)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    filter_ = StopStringMatcher(stops)
    shown = ""
    for piece in pieces:
        shown += filter_.push(piece)
        assert text.startswith(shown)
        if filter_.is_stopped:
            break
    if not ends:
        assert not filter_.is_stopped
        assert shown + filter_.finish() == text
    else:
        assert filter_.is_stopped
        assert not any(stop in shown for stop in stops)
        assert any(text[len(shown) :].startswith(stop) for stop in stops)


@given(stage=st.text(max_size=12), progress=st.none() | st.floats(0, 1))
def test_no_503_says_ok(stage: str, progress: float | None) -> None:
    state = ServerState()
    for prefix in ("", "tok", "broken ", "OK"):
        state.reach(prefix + stage, progress)
        for phase in (Phase.STARTING, Phase.DRAINING, Phase.DEAD):
            state.phase = phase
            status, body = state.health()
            assert status == 503
            assert "ok" not in json.dumps(body, ensure_ascii=False).lower()
            assert "ok" not in state.refusal().lower()


def test_a_long_text_is_encoded_beside_other_threads(smollm2: Path) -> None:
    """Whoever holds the GIL while it encodes keeps every stream of the server waiting."""
    codec, text = ModelTokenizer(smollm2), "water basin wheel " * 200_000
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.perf_counter()
    codec.encode(text, add_special_tokens=False)
    ended = time.perf_counter()
    done.set()
    thread.join()
    times = [began, *(at for at in ticks if began < at < ended), ended]
    longest = max(later - earlier for earlier, later in itertools.pairwise(times))
    assert longest < (ended - began) / 2
