"""Each fuzz target reads its saved inputs without an error: inputs made by hand, and inputs of earlier failures.

See ``scripts/fuzz``.
"""

import pathlib

import pytest

from tests.fuzz import targets, words

CORPUS = pathlib.Path(__file__).parent / "corpus"
INPUTS = sorted(path for path in CORPUS.glob("*/*") if path.is_file())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_each_fuzz_target_reads_every_input_of_its_corpus(path: pathlib.Path) -> None:
    targets.TARGETS[path.parent.name](path.read_bytes())


def test_each_fuzz_target_has_corpus_inputs_and_is_named_by_the_fuzzing_script() -> None:
    assert {path.parent.name for path in INPUTS} == targets.TARGETS.keys()
    script = (CORPUS.parents[1] / "scripts/fuzz").read_text()
    named = script.partition("Targets: ")[2].partition(";")[0].replace("#", "").replace("\n", "")
    assert {word.strip() for word in named.split(",")} == targets.TARGETS.keys()


def test_the_words_for_fuzzing_can_be_written_to_a_libfuzzer_dictionary() -> None:
    assert all(word.isascii() and word.isprintable() and '"' not in word.replace('\\"', "") for word in words.ALL)
