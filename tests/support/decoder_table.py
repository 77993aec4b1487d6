"""Writes the tables of docs/models.md from those that the tests run through: decoders, and the models of recipes.

Usage: `python -m tests.support.decoder_table`.
"""

from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specray.models.registry import MODELS
from specray.models.transformers_skeleton import attention_calls, build_skeleton
from specray.models.transformers_states import state_layers
from tests.support.decoders import SERVED, decoder_config
from tests.support.published_mtp import FAMILIES
from tests.support.recipes import RECIPES, Recipe

COMMAND = "python -m tests.support.decoder_table"
PAGE = Path(__file__).parents[2] / "docs/models.md"
END = "<!-- end -->"
_HEADER = "| computed by | attention | decoders; * has experts, + checkpoints with MTP layers |\n|---|---|---|\n"
_OWN_ONLY = ("MiMoForCausalLM",)  # transformers has no class for it
_NATIVE_MTP = {"MiMoForCausalLM", "DeepseekV3ForCausalLM"}


def filled(page: str) -> str:
    """The page with the table."""
    for name, content in (("decoders", decoders()), ("recipes", recipes())):
        before, begin, rest = page.partition(f"<!-- {name} -->\n")
        page = before + begin + content + END + rest.partition(END)[2]
    return page


def recipes() -> str:
    """How many of vLLM's recipes are served, and a row for each way, in Markdown."""
    rows: dict[str, dict[str, list[str]]] = {}
    for recipe in sorted(RECIPES, key=lambda recipe: (not recipe.is_served, bool(recipe.limit))):
        details = rows.setdefault(_way(recipe), {}).setdefault(recipe.shown, [])
        details += [part for part in (recipe.architecture, recipe.drafts) if part and part not in details]
    served = sum(len(recipe.names) for recipe in RECIPES if recipe.is_served)
    short = sum(len(recipe.names) for recipe in RECIPES if recipe.is_served and recipe.limit)
    total = sum(len(recipe.names) for recipe in RECIPES)
    listed = {
        way: ", ".join(f"{name} ({', '.join(details)})" for name, details in families.items())
        for way, families in rows.items()
    }
    head = f"{served} of {total} are served, {short} of them with a short context.\n\n"
    return head + "".join(f"- {way}: {families}\n" for way, families in listed.items())


def _way(recipe: Recipe) -> str:
    if not recipe.is_served:
        return f"not served, {recipe.limit}"
    impl = "native" if f"{recipe.architecture}ForCausalLM" in MODELS else "transformers"
    return f"{impl}, {recipe.limit}" if recipe.limit else impl


def decoders() -> str:
    """A row for each kind of attention, in Markdown."""
    found = {name: ("native", frozenset[str](), False) for name in _OWN_ONLY}
    for name in SERVED:
        config = decoder_config(name)
        skeleton = build_skeleton(config, torch.float32)
        architecture = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type])
        impl = "native" if architecture in MODELS else "transformers"
        _, traits, _ = found.get(architecture, (impl, frozenset[str](), False))
        found[architecture] = impl, traits | _traits(skeleton), _has_experts(skeleton)
    published = {
        str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[decoder_config(name).model_type]) for name in FAMILIES.keys() & SERVED
    }
    rows: dict[tuple[str, str], list[str]] = {}
    for architecture, (impl, traits, has_experts) in sorted(found.items(), key=lambda item: item[0].lower()):
        name = architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "*" * has_experts
        name += "+" * (architecture in _NATIVE_MTP | published)
        rows.setdefault((impl, ", ".join(sorted(traits)) or "full"), []).append(name.replace("*", "\\*"))
    return _HEADER + "".join(
        f"| {impl} | {kind} | {', '.join(names)} |\n" for (impl, kind), names in sorted(rows.items())
    )


def _traits(skeleton: Any) -> frozenset[str]:
    calls = attention_calls(skeleton).values()
    sizes = {(call.num_heads, call.num_kv_heads, call.qk_dim) for call in calls}
    found = {
        "states": bool(state_layers(skeleton)),
        "window": any(call.window is not None for call in calls),
        "softcap": any(call.softcap is not None for call in calls),
        "sinks": any(call.sinks is not None for call in calls),
        "heads differ": len(sizes) > 1,
        "shared KV": any(call.source is not None for call in calls),
        "values of another size": any(call.v_dim != call.qk_dim for call in calls),
    }
    return frozenset(name for name, has in found.items() if has)


def _has_experts(skeleton: Any) -> bool:
    return any(hasattr(module, "has_gate") for module in skeleton.modules())


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
