"""The row of docs/compatibility.md that this node is: which features its kernel has, for ``ipvsproxy doctor``."""

from collections.abc import Iterator

from ipvsproxy.commands.inspection import Document
from ipvsproxy.kernel.facts import Facts
from ipvsproxy.kernel.questions import Answer
from ipvsproxy.model import features
from ipvsproxy.model.feature import OLDEST, Feature, dotted

NOT_ASKED = Answer(None)


def describe(facts: Facts) -> Document:
    """The kernel as a document. ``has`` is None for a feature of which the kernel says nothing, or that was not asked for."""
    row = features.row_of(facts.version)
    return {
        "release": facts.release,
        "row": {"kernel": dotted(row.version), "distributions": list(row.distributions)} if row else None,
        "features": [_feature(feature, facts.answers.get(feature, NOT_ASKED)) for feature in features.FEATURES],
    }


def _feature(feature: Feature, answer: Answer) -> Document:
    return {
        "name": feature.name,
        "has": answer.has,
        "remark": answer.remark,
        "feature": feature.words,
        "parts": list(feature.parts),
        "use": feature.use,
        "since": dotted(feature.since),
        "without": feature.without.value,
        "meaning": feature.sentence,
    }


def render(kernel: Document) -> Iterator[str]:
    """The row for people: one line for what the kernel has, one for each feature that it lacks, and one for all others.

    Those others that share a remark, such as how to ask for them, have a line of their own.
    """
    row = kernel["row"]
    near = f"{row['kernel']} ({', '.join(row['distributions'])})" if row else f"none, before {dotted(OLDEST)}"
    yield f"kernel features, as in docs/compatibility.md; the row of this kernel is {near}:"
    by_answer = {answer: [one for one in kernel["features"] if one["has"] is answer] for answer in (True, False, None)}
    yield f"  has: {_names(by_answer[True])}"
    for one in by_answer[False]:
        remark = f" ({one['remark']})" if one["remark"] else ""
        yield f"  lacks {one['name']}{remark}: {one['without']}: {one['meaning']}"
    unknown: dict[str, list[Document]] = {}
    for one in by_answer[None]:
        unknown.setdefault(one["remark"], []).append(one)
    for remark, listed in unknown.items():
        yield f"  not known{f' ({remark})' if remark else ''}: {_names(listed)}"


def _names(listed: list[Document]) -> str:
    return ", ".join(one["name"] for one in listed) or "none"
