"""Corpora: their files, what is found in them, whose requests they serve, and the command that makes them."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specray.cli import main as cli
from specray.config import CorpusOptions, SpeculativeConfig
from specray.errors import ConfigError
from specray.models.tokenizer import load_tokenizer
from specray.spec_decode import check_speculative
from specray.spec_decode.corpus import GAP, Corpus, open_corpora, sorted_places, tokenizer_digest, write_corpus
from specray.spec_decode.ngram import NgramDrafter
from specray.spec_decode.ngram_index import MOST_PLACES
from specray.spec_decode.ngram_rules import ngram_rules
from specray.tenants import tenant_scoped
from tests.support.drafters import Tokens, make_context, paths_of

NGRAM = SpeculativeConfig(algorithm="NGRAM")
texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=5)


def opened(
    path: Path, *written: list[int], name: str = "docs", tenants: tuple[str, ...] = (), number: int = 0
) -> Corpus:
    write_corpus(path / name, written, "a tokenizer")
    return Corpus(CorpusOptions(name=name, path=str(path / name), tenants=tenants), "a tokenizer", number)


@given(written=texts, last=st.lists(st.integers(0, 2), min_size=1, max_size=8), window=st.integers(1, 9))
def test_the_longest_matches_are_found(
    tmp_path_factory: pytest.TempPathFactory, written: list[list[int]], last: list[int], window: int
) -> None:
    corpus = opened(tmp_path_factory.mktemp("corpus"), *written)
    expected = []
    for text in written:
        for end in range(1, len(text)):
            length = 0
            while length < min(end, len(last), window) and text[end - 1 - length] == last[-1 - length]:
                length += 1
            if length:
                expected.append((length, text[end : end + 3]))
    found = [(match.length, match.follows) for match in corpus.find(last, window, reach=3).values()]
    assert all(match in expected for match in found)
    lengths = sorted((length for length, _ in expected), reverse=True)
    assert sorted((length for length, _ in found), reverse=True) == lengths[:MOST_PLACES]


def test_places_are_sorted_by_what_is_before_them() -> None:
    tokens = np.array([GAP, 5, 1, 7, GAP, 2, 1, 9, GAP], dtype=np.int32)
    before = [tokens[place - 1 :: -1][:2].tolist() for place in sorted_places(tokens)]
    assert before == [[1, 2], [1, 5], [2, GAP], [5, GAP]]


def test_a_corpus_is_drafted_from_for_its_tenants(tmp_path: Path) -> None:
    shared = opened(tmp_path, [1, 2, 3, 4, 5])
    private = opened(tmp_path, [1, 2, 30, 40], name="private", tenants=("team",), number=1)
    drafter = NgramDrafter(ngram_rules(NGRAM), [shared, private])

    def drafted(tenant: str) -> set[tuple[int, ...]]:
        context = make_context([Tokens(0, [9, 1, 2], cache_salt=tenant_scoped(tenant, ""))])
        tree = drafter.propose(context).to_lists()[0]
        drafter.release([0])
        return set(paths_of(tree))

    assert (3, 4, 5) in drafted("other")
    assert (30,) not in drafted("other")
    assert {(3, 4), (30, 40)} <= drafted("team")


def test_a_token_of_several_texts_is_one_node(tmp_path: Path) -> None:
    drafter = NgramDrafter(ngram_rules(NGRAM), [opened(tmp_path, [1, 2, 3, 4])])
    tree = drafter.propose(make_context([Tokens(0, [1, 2, 3, 4, 1, 2], cache_salt="salt")]))
    assert tree.to_lists()[0].tokens[:3] == [2, 3, 4]
    assert not tree.repeats_sibling().any()


def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, toy: Path) -> None:
    write_corpus(tmp_path / "good", [[1, 2, 3]], tokenizer_digest(load_tokenizer(toy)))
    (tmp_path / "text").write_text("a text, not a corpus")
    write_corpus(tmp_path / "other", [[1, 2, 3]], "another tokenizer")
    write_corpus(tmp_path / "large", [[1] * 200_000], tokenizer_digest(load_tokenizer(toy)))
    content = (tmp_path / "good").read_bytes()
    (tmp_path / "short").write_bytes(content[:-8])

    def options(name: str) -> SpeculativeConfig:
        corpus = CorpusOptions(name="docs", path=str(tmp_path / name), max_mb=1)
        return NGRAM.model_copy(update={"corpora": (corpus,)})

    assert len(open_corpora(options("good"), toy)) == 1
    for name, reason in {
        "missing": "is no file; make one with `specray corpus build",
        "text": "cannot be read.*; make one with `specray corpus build",
        "short": "cannot be read.*; make one with `specray corpus build",
        "other": "tokenizer of another model",
        "large": "more than max_mb=1",
    }.items():
        with pytest.raises(ConfigError, match=reason) as caught:
            open_corpora(options(name), toy)
        assert "corpora, docs" in str(caught.value)


def test_two_corpora_of_one_name_and_corpora_that_nothing_reads_are_refused() -> None:
    docs = {"name": "docs", "path": "x"}
    with pytest.raises(ConfigError, match="two of them are named 'docs'"):
        check_speculative(SpeculativeConfig.model_validate({"algorithm": "NGRAM", "corpora": [docs, docs]}))
    head = {"algorithm": "EAGLE3", "draft_model_path": "x", "corpora": [docs]}
    with pytest.raises(ConfigError, match=r"corpora=.* has no effect with algorithm=EAGLE3"):
        check_speculative(SpeculativeConfig.model_validate(head))
    check_speculative(SpeculativeConfig.model_validate(head | {"merged_draft_tokens": 12}))


def test_the_command_makes_a_corpus_of_files(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, out = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "new" / "docs.corpus"
    first.write_text("the quick brown fox\njumps\n")
    second.write_text("over the lazy dog")
    build = ["corpus", "build", "--model", str(toy), "--out", str(out)]
    assert cli.main([*build, str(first), str(second)]) == 0
    assert "of 2 files" in capsys.readouterr().out
    tokenizer = load_tokenizer(toy)
    ids = tokenizer.encode("the quick brown fox\njumps\n", add_special_tokens=False)
    corpus = Corpus(CorpusOptions(name="docs", path=str(out)), tokenizer_digest(tokenizer))
    assert any(match.follows == ids[3:6] for match in corpus.find(ids[:3], 12, 3).values())

    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").write_text("")
    os.mkfifo(tmp_path / "fifo")
    for arguments, error in (
        ([str(tmp_path / "missing")], "missing: No such file"),
        ([str(tmp_path / "binary")], "binary is not UTF-8 text"),
        ([str(tmp_path / "empty")], "no text"),
        ([str(first), "--max-tokens", "3"], "more than --max-tokens 3"),
        ([str(tmp_path)], "Is a directory"),
        (["/dev/zero"], "is a device"),
        ([str(tmp_path / "fifo")], "is a named pipe"),
    ):
        assert cli.main([*build, *arguments]) == 2
        assert error in capsys.readouterr().err
    reading, writing = os.pipe()
    os.write(writing, b"A text that another program writes.")
    os.close(writing)
    assert cli.main([*build, f"/dev/fd/{reading}"]) == 0
    os.close(reading)
    (tmp_path / "folder").mkdir()
    for refused, error in (
        (first, "is one of the texts"),
        (tmp_path / "folder", "not a regular file"),
        (second / "x", "not a folder"),
    ):
        before = first.read_text()
        assert cli.main(["corpus", "build", "--model", str(toy), "--out", str(refused), str(first)]) == 2
        assert error in capsys.readouterr().err
        assert first.read_text() == before
