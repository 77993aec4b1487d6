"""`python -m tests.mutants`: bugs that this code or another server had, put back one by one; a test must fail on each.

Works on a copy of the code. Exit status 1 if the named tests passed with a bug. `tests.chaos.unguarded` does the same
for the safeguards of a cluster.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.unit.engine.test_audit import MISMATCHES_FOUND

ROOT = Path(__file__).parents[1]
AUDIT = "tests/unit/engine/test_audit.py"
AUDIT_FAILS = f"AssertionError: {MISMATCHES_FOUND}"
IN_GRAPHS = "tests/lossless/test_states.py -k graphs_leave and qwen3_5"
COPIED = ("cluster", "specray", "tests", "benchmarks", "configs", "deploy", "docs", "examples", "pyproject.toml")


class Mutant(NamedTuple):
    """A bug: what to write in one file instead of what, and the tests that must fail then."""

    name: str
    file: str
    old: str
    new: str
    tests: str  # pytest's arguments
    kernels: str = "auto"  # SPECRAY_KERNELS, where another code path than this machine's has the bug
    audit: str = ""  # keyword of a test of AUDIT that must fail too: audits of a server see the bug


MUTANTS = (
    Mutant(
        "grammars: one may take any memory to compile",
        "specray/structured_output/compile_check.py",
        "    resource.setrlimit(resource.RLIMIT_AS, (size + MAX_GRAMMAR_BYTES,) * 2)\n",
        "    assert size\n",
        "tests/unit/structured_output/test_compile_check.py -k large",
    ),
    Mutant(
        "grammars: any white space in JSON",
        "specray/structured_output/schema.py",
        '"whitespace_flexible": False',
        '"whitespace_flexible": True',
        "tests/unit/structured_output/test_schemas.py -k one_space",
    ),
    Mutant(
        "grammars: sets that exclude quotes match them in JSON strings",
        "specray/structured_output/regular_expressions.py",
        'return f"[^{members}{_NUL}]"',
        'return f"[^{members}]"',
        "tests/unit/structured_output/test_schemas.py -k enforced_in_full",
    ),
    Mutant(
        "grammars: a schema that requires itself is compiled",
        "specray/structured_output/finite_values.py",
        "    if root is not None and root not in finite:",
        "    if root is None and root not in finite:",
        "tests/unit/structured_output/test_schemas.py -k without_finite_values",
    ),
    Mutant(
        "chats: special tokens in messages become control tokens",
        "specray/models/tokenizer.py",
        "        if self.marks(text, whole) == marks:\n            return whole.ids\n",
        "        return whole.ids\n",
        "tests/unit/models/test_published_specials.py",
    ),
    Mutant(
        "chats: a template makes special tokens of other characters",
        "specray/models/chat_disguise.py",
        "for char in chosen[:count]} for count in (1, 2))",
        "for char in chosen[:count]} for count in (1, 1))",
        "tests/unit/models/test_tokenizer.py -k makes_of_messages",
    ),
    Mutant(
        "chats: a template loops without end",
        "specray/models/tokenizer.py",
        "with cpu_limit(MAX_CPU_S):",
        "with cpu_limit(2.0):",
        "tests/unit/models/test_tokenizer.py -k loop_or_write",
    ),
    Mutant(
        "keys: a comparison ends at the first match",
        "specray/server/access/keys.py",
        "                found = entry.name\n",
        "                return entry.name\n",
        "tests/unit/server/test_keys.py -k compares_all",
    ),
    Mutant(
        "keys: tenants share cached prefixes",
        "specray/server/choices.py",
        "namespace = tenant_scoped(tenant, cache_salt)",
        "namespace = tenant_scoped('', cache_salt)",
        "tests/unit/server/test_keys.py -k cached_prefixes",
    ),
    Mutant(
        "cache: namespaces share a tree",
        "specray/engine/radix_cache.py",
        "            self._roots[namespace] = CacheNode(block_id=0, parent=None, namespace=namespace)\n",
        "            self._roots[namespace] = next(iter(self._roots.values()), CacheNode(block_id=0, parent=None))\n",
        "tests/unit/engine/test_radix_cache.py",
    ),
    Mutant(
        "stops: text behind a stop string inside an accepted block",
        "specray/engine/stop_strings.py",
        "    start, length, stop = min(matches)\n",
        "    start, length, stop = max(matches)\n",
        "tests/unit/engine/test_detokenizer.py",
    ),
    Mutant(
        "stops: tokens behind the end of the output are kept",
        "specray/engine/detokenizer.py",
        "return Cut(index + 1, self._take(len(self._text)), reason, stop, lengths)",
        "return Cut(len(token_ids), self._take(len(self._text)), reason, stop, lengths)",
        "tests/unit/engine/test_detokenizer.py",
    ),
    Mutant(
        "verification: a sampled request's nodes are chosen by argmax",
        "specray/spec_decode/torch_step_ops.py",
        "    if options is None:\n        chosen =",
        "    if True:\n        chosen =",
        "tests/unit/spec_decode/test_verifier.py",
    ),
    Mutant(
        "verification: noise of a node at the position of the root",
        "specray/spec_decode/torch_step_ops.py",
        "inputs.lengths[:, None] + inputs.tree.ancestors().sum(-1) - 1",
        "inputs.lengths[:, None] + 0 * inputs.tree.ancestors().sum(-1)",
        "tests/unit/spec_decode/test_verifier.py",
    ),
    Mutant(
        "verification: logits that are not numbers are tokens",
        "specray/spec_decode/torch_step_ops.py",
        "    is_finite = logits.gather(1, chosen[:, None])[:, 0].isfinite()\n",
        "    is_finite = torch.ones_like(chosen, dtype=torch.bool)\n",
        "tests/unit/spec_decode/test_verifier.py",
        kernels="torch",
    ),
    Mutant(
        "verification: noise of all depths at the position of the root",
        "specray/spec_decode/depth_walk.py",
        "inputs.lengths[:, None] + torch.arange(",
        "inputs.lengths[:, None] + 0 * torch.arange(",
        "tests/unit/spec_decode/test_verifier.py",
        kernels="torch",
        audit="llama",
    ),
    Mutant(
        "verification: a tree's nodes have the positions of a chain's",
        "specray/spec_decode/torch_step_ops.py",
        "torch.where(node > 0, places_in_kv - node + depth, places_in_kv)",
        "places_in_kv",
        "tests/lossless/test_edges.py",
        kernels="torch",
        audit="right-last-llama",
    ),
    Mutant(
        "states: accepted drafts are not committed",
        "specray/worker/torch_backend.py",
        "                self.runner.states.commit([output.accepted_nodes(row) for row in range(len(rows.states))])\n",
        "                self.runner.states.commit([[] for _ in rows.states])\n",
        "tests/lossless/test_states.py -k qwen3_5-right",
        audit="qwen3_5",
    ),
    Mutant(
        "states: the last accepted draft is not committed",
        "specray/worker/torch_backend.py",
        "output.accepted_nodes(row) for row in",
        "output.accepted_nodes(row)[:-1] for row in",
        "tests/lossless/test_states.py -k qwen3_5-right",
        audit="qwen3_5",
    ),
    Mutant(
        "states: the first nodes of a tree are committed instead of its path",
        "specray/ops/states.py",
        "            places += [start + node - 1 for node in nodes]\n",
        "            places += range(start, start + len(nodes))\n",
        "tests/lossless/test_states.py -k qwen3_5-right-last",
        audit="qwen3_5",
    ),
    Mutant(
        "states: the drafts of another request are committed",
        "specray/ops/states.py",
        "            start += count\n",
        "            start += len(nodes)\n",
        "tests/lossless/test_states.py -k qwen3_5-half-right",
        audit="qwen3_5",
    ),
    Mutant(
        "states: rejected drafts stay",
        "specray/ops/states.py",
        "        return operation(inputs, pool, self._rows)\n",
        "        return operation(inputs, pool, replace(self._rows, num_known=self._rows.lens))\n",
        "tests/lossless/test_states.py -k qwen3_5-wrong",
        audit="qwen3_5",
    ),
    Mutant(
        "states: a node continues the node before it instead of its parent",
        "specray/ops/states.py",
        "np.array(trees[row][1 : 1 + length - known]) + first + known - 1",
        "np.arange(first + known - 1, end - 1)",
        "tests/lossless/test_states.py -k qwen3_5-right-last",
        audit="qwen3_5",
    ),
    Mutant(
        "states: a request begins with the states of another one",
        "specray/worker/state_pool.py",
        "[state.num_computed_tokens == 0 for state in rows.states]",
        "[state.num_computed_tokens < 0 for state in rows.states]",
        "tests/lossless/test_states.py -k slot",
    ),
    Mutant(
        "states: a request starts behind cached blocks without their states",
        "specray/worker/state_pool.py",
        "            if new.stored_state >= 0:\n",
        "            if new.stored_state < 0:\n",
        "tests/lossless/test_states.py -k stored and qwen3_5-float32",
    ),
    Mutant(
        "states: those stored behind accepted drafts are stored a token too late",
        "specray/ops/states.py",
        "{count - num_known[request]: row for",
        "{count - num_known[request] + 1: row for",
        "tests/lossless/test_states.py -k stored and qwen3_5-float32",
    ),
    Mutant(
        "states: those of another place are stored for a block",
        "specray/engine/stored_states.py",
        "request.shared_path[place // self._block_size - 1]",
        "request.shared_path[place // self._block_size - 2]",
        "tests/unit/engine/test_scheduler.py",
    ),
    Mutant(
        "states: a row is given away while it is stored behind a block",
        "specray/engine/stored_states.py",
        "            self.forget(next(iter(self._rows)))\n",
        "            self._free.append(next(iter(self._rows.values())))\n",
        "tests/unit/engine/test_scheduler.py",
    ),
    Mutant(
        "graphs of states: accepted drafts are not committed",
        "specray/worker/state_pool.py",
        "num_kept(outcome) - 1, 0).clamp(min=0)",
        "num_kept(outcome) - 1, 0).clamp(max=0)",
        IN_GRAPHS,
    ),
    Mutant(
        "graphs of states: the last accepted draft is not committed",
        "specray/worker/state_pool.py",
        "num_kept(outcome) - 1, 0).clamp(min=0)",
        "num_kept(outcome) - 2, 0).clamp(min=0)",
        IN_GRAPHS,
    ),
    Mutant(
        "graphs of states: roots are committed again",
        "specray/worker/state_pool.py",
        "nodes_of(outcome)[:, 1:]",
        "nodes_of(outcome)[:, :-1]",
        IN_GRAPHS,
    ),
    Mutant(
        "graphs of states: the drafts of another request are committed",
        "specray/worker/state_pool.py",
        "starts[:, None] + nodes",
        "0 * starts[:, None] + nodes",
        IN_GRAPHS,
    ),
    Mutant(
        "graphs of states: rejected drafts stay",
        "specray/worker/state_pool.py",
        "PaddedStateRows(slots, is_request.long(), is_fresh",
        "PaddedStateRows(slots, is_request.long() * width, is_fresh",
        IN_GRAPHS,
    ),
    Mutant(
        "graphs of states: those stored behind accepted drafts are stored a token too late",
        "specray/worker/state_pool.py",
        "self._copies[:count, 1 : 1 + width]",
        "self._copies[:count, :width]",
        IN_GRAPHS,
    ),
    Mutant(
        "headers: a request ID that is not text reaches Serve's proxy",
        "cluster/proxy.py",
        "        if not _is_utf8(name) or not _is_utf8(value):\n",
        "        if False:\n",
        "tests/unit/cluster/test_proxy.py",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="only mutants with one of these in their name")
    words = parser.parse_args(argv).words
    mutants = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    survivors = [mutant for mutant in mutants if not is_killed(mutant)]
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} bugs are found")
    return 1 if survivors else 0


def is_killed(mutant: Mutant) -> bool:
    """Whether the mutant's tests fail on it, and those of audits if it names some."""
    with tempfile.TemporaryDirectory(prefix="specray-mutant-") as folder:
        for part in COPIED:
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, Path(folder, part), ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / part, folder)
        path = Path(folder, mutant.file)
        text = path.read_text(encoding="utf-8")
        assert text.count(mutant.old) == 1, f"{mutant.file} no longer contains {mutant.old!r} once"
        path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        audit = [f"{AUDIT} -k {mutant.audit} and honest"] * bool(mutant.audit)
        return _fails(mutant, mutant.tests, folder) and all(_fails(mutant, each, folder, AUDIT_FAILS) for each in audit)


def _fails(mutant: Mutant, tests: str, folder: str, reason: str = "") -> bool:
    """Whether a test fails, with `reason` in its error."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split(" ", 2)]
    environment = os.environ | {"PYTHONPATH": folder, "SPECRAY_KERNELS": mutant.kernels}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    failed = [line for line in run.stdout.splitlines() if line.startswith("FAILED")]
    is_found = run.returncode == 1 and bool(failed) and reason in run.stdout
    outcome = failed[0] if is_found else f"NOT FOUND (status {run.returncode}): {(run.stdout + run.stderr)[-300:]}"
    print(f"{mutant.name}: {outcome}", flush=True)
    return is_found


if __name__ == "__main__":
    sys.exit(main())
