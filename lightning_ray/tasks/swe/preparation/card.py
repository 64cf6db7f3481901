"""The data card: where the tasks come from, what was dropped and why, what was kept.

`tree` is the card as data, `markdown` the same for people, by the template beside this module.
Pure. Invariant: the counts are those of the pipeline's accounts, which balance.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import jinja2

from lightning_ray.records import Json
from lightning_ray.tasks.swe.preparation.options import Options
from lightning_ray.tasks.swe.preparation.pipeline import Outcome

# Repositories that the page lists; the JSON has all.
SHOWN = 20
_TEMPLATE = Path(__file__).with_name("card.md.jinja")


def tree(outcome: Outcome, options: Options) -> Json:
    """The card as JSON."""
    return {
        "sources": outcome.sources,
        "held_out": outcome.held_out,
        "unreadable_rows": outcome.unreadable,
        "splits": {
            str(split): {
                "read": account.read,
                "kept": account.kept,
                "dropped": dict(account.dropped),
                "repositories": _largest_first(outcome.repositories.get(split, Counter())),
            }
            for split, account in outcome.splits.items()
        },
        "probe": {str(solved): tasks for solved, tasks in outcome.probe.items()},
        "options": options.model_dump(mode="json"),
        "filters": outcome.meanings,
    }


def markdown(card: Json) -> str:
    """The card that `tree` made as a page."""
    used = {name for split in card["splits"].values() for name in split["dropped"]}
    template = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    ).from_string(_TEMPLATE.read_text())
    unused = [name for name in card["filters"] if name not in used]
    return template.render(card, used=used, unused=unused, shown=SHOWN) + "\n"


def _largest_first(counts: Counter[str]) -> dict[str, int]:
    found = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return {name: count for name, count in found if count}
