"""The model card of what was trained: what it is, what it learnt from, how, and how good it was on held-out answers."""

from dataclasses import asdict
from typing import Any

from specray.train.settings import Counters, TrainSettings

_METHODS = {"eagle3": "EAGLE-3 draft head", "eagle2": "EAGLE-2 draft head", "mtp": "MTP layer", "draft": "Draft model"}


def model_card(
    config: dict[str, Any],
    settings: TrainSettings,
    answers: dict[str, Any],
    counters: Counters,
    validation: dict[str, Any] | None,
) -> str:
    """README.md of a head or draft model, in Markdown."""
    method = _METHODS[settings.kind]
    parts = [
        f"# {method} for {answers['model']}",
        f"Made by `specray train {settings.kind}`. It drafts tokens for {answers['model']}, which verifies each of "
        "them; it is of no use alone.",
        "## Data\n\nAnswers the target wrote itself; evaluation sets had no part in it.\n\n" + _data(answers),
        "## Training\n\n" + _training(settings, counters, config),
        "## Held-out answers\n\n" + _figures(validation),
    ]
    return "\n\n".join(parts) + "\n"


def _data(answers: dict[str, Any]) -> str:
    shown = {name: value for name, value in answers.items() if name != "prompt_files"}
    lines = [f"- {name}: {_plain(value)}" for name, value in shown.items()]
    for file in answers.get("prompt_files", []):
        licences = ", ".join(f"{name} ({count})" for name, count in file.get("licences", {}).items())
        lines.append(f"- prompts of {file.get('file')}: {file.get('prompts')}; licences: {licences or 'none stated'}")
    return "\n".join(lines)


def _training(settings: TrainSettings, counters: Counters, config: dict[str, Any]) -> str:
    hours = counters.seconds / 3600
    rows = {"steps": f"{counters.steps:,}", "tokens seen": f"{counters.all_tokens:,}", "hours": f"{hours:.1f}"}
    rows |= {name.replace("_", " "): _plain(value) for name, value in asdict(settings).items() if value is not None}
    if settings.init_head:
        rows["init head"] = f"an earlier head of this trainer, after {counters.tokens_before:,} tokens"
    rows["draft vocabulary"] = str(config.get("draft_vocab_size", "that of the target"))
    return "\n".join(f"- {name}: {value}" for name, value in rows.items())


def _figures(validation: dict[str, Any] | None) -> str:
    if validation is None:
        return "Not validated: no sequence was held out."
    figures = validation["validation"]
    lines = [
        f"{figures['num_sequences']} sequences, {figures['num_positions']:,} positions, "
        f"after {validation['tokens']:,} tokens; accept length of a chain of {len(figures['top1'])} drafts at "
        f"temperature 0, estimated: **{figures['accept_length']:.2f}**.",
        "| depth | best token agrees | given all before did | target's token in the best 4 | in the best 8 |",
        "|---|---|---|---|---|",
    ]
    columns = zip(figures["top1"], figures["conditional"], figures["top4"], figures["top8"], strict=True)
    for depth, shares in enumerate(columns, start=1):
        lines.append(f"| {depth} | " + " | ".join(f"{share:.3f}" for share in shares) + " |")
    return "\n".join((lines[0], "", *lines[1:]))


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
