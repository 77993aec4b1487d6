"""`specray check` reports every error in a configuration and prints the resources of a valid one."""

from pathlib import Path

import pytest
import yaml

from cluster.cli.check import check_file
from cluster.cli.plan import plan_text, total
from cluster.cli.serve import check as main
from cluster.config import AppConfig
from cluster.engine.placement import bundles
from specray.errors import ConfigError
from tests.support.serve_file import SERVE_CONFIG


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("algorithm: NGRAM", "algorithm: NGRM", "speculative.algorithm='NGRM' is not known; choose one of"),
        ("model:", "modle:", "specray.args.modle: unknown option; did you mean model?"),
        ("request_timeout_s", "request_timeout", "did you mean request_timeout_s?"),
        ("max_running_requests: 4", "max_running_requests: 0", "specray.args.max_running_requests=0"),
        ("    args:", "    arg:", "applications.0.arg: unknown option; did you mean args?"),
        ("port: 8000", "prt: 8000", "http_options.prt: unknown option; did you mean port?"),
        ("cluster.app:build", "other:app", "set applications[0].import_path to cluster.app:build"),
        ("applications:", "applications: [", "is not YAML"),
    ],
)
def test_errors_have_their_place_and_a_fix(old: str, new: str, message: str, serve_config: Path) -> None:
    serve_config.write_text(SERVE_CONFIG.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        check_file(serve_config)
    assert message in str(caught.value)


def test_an_error_repeats_neither_other_options_nor_a_value_without_end(tmp_path: Path) -> None:
    config = tmp_path / "specray.yaml"
    config.write_text("applications: [{args: {secret: s3cr3t}}]\n")
    with pytest.raises(ConfigError, match="import_path: Field required") as caught:
        check_file(config)
    assert "s3cr3t" not in str(caught.value)
    rows = ["a0: &a0 [x]", *(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]" for i in range(9))]
    config.write_text("\n".join([*rows, "model: *a9"]))
    with pytest.raises(ConfigError) as caught:
        check_file(config)
    assert len(str(caught.value)) < 4000


def test_a_plan_lists_the_processes_of_every_bundle() -> None:
    config = AppConfig.model_validate(
        {
            "device": "cuda",
            "tp_size": 2,
            "speculative": {"algorithm": "NGRAM"},
            "draft": {"placement": "colocated"},
            "server": {"num_replicas": 3, "num_ingress_replicas": 2, "rank_cpus": 1, "router_cpus": 0.5},
        }
    )
    assert plan_text(config).splitlines() == [
        "  3 engines, each a placement group, all on one node (STRICT_PACK):",
        "    bundle 0: router + rank 0 + NGRAM drafter: 1.6 CPU, 1 GPU",
        "    bundle 1: rank 1: 1 CPU, 1 GPU",
        "  2 ingress replicas, anywhere: 0.1 CPU each",
        "  total: 8 CPU, 6 GPU",
    ]


def test_a_plan_without_a_colocated_drafter_lists_none() -> None:
    inline = {"speculative": {"algorithm": "NGRAM"}, "draft": {"placement": "inline"}, "device": "cpu"}
    for options in ({"device": "cpu"}, inline):
        assert "drafter" not in plan_text(AppConfig.model_validate(options))


def test_a_plan_for_an_automatic_device_shows_both_totals() -> None:
    assert plan_text(AppConfig()).splitlines()[-1].startswith("  total if the cluster has GPUs: ")


def test_a_plan_with_autoscaling_counts_the_maximum_of_engines() -> None:
    config = AppConfig.model_validate({"autoscaling": {"enabled": True, "min_replicas": 2, "max_replicas": 5}})
    assert "2 to 5 engines" in plan_text(config)
    one = sum(bundle["CPU"] for bundle in bundles(config, with_gpus=False))
    assert total(config, with_gpus=False)["CPU"] == pytest.approx(5 * one + config.server.ingress_cpus)


def test_a_plan_sums_custom_resources() -> None:
    config = AppConfig.model_validate({"tp_size": 2, "placement": {"rank_resources": {"rack": 0.5}}})
    assert total(config, with_gpus=True)["rack"] == 1.0


def test_check_prints_the_plan_of_each_application(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = yaml.safe_load(SERVE_CONFIG)
    document["applications"].append(document["applications"][0] | {"name": "second", "route_prefix": "/second"})
    path = tmp_path / "two.yaml"
    path.write_text(yaml.safe_dump(document))
    assert main([str(path)]) == 0
    assert capsys.readouterr().out.count("bundle 0: router + rank 0") == 2


def test_check_says_which_models_it_has_not_seen(serve_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The name of a model on the hub, or a misspelt one of the package: only fetching it can tell."""
    serve_config.write_text(SERVE_CONFIG.replace("model: smollm2-135m-instruct", "model: smolm2-135m"))
    assert main([str(serve_config)]) == 0
    assert "not checked, because not on this machine: smolm2-135m (--fetch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "option"),
    [
        ("model: smollm2-135m-instruct", "model: ./nowhere", "model='./nowhere'"),
        ("{algorithm: NGRAM}", "{algorithm: EAGLE3, draft_model_path: ./nowhere}", "speculative.draft_model_path="),
    ],
)
def test_check_looks_for_models_that_are_named_by_a_path(
    old: str, new: str, option: str, serve_config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve_config.write_text(SERVE_CONFIG.replace(old, new))
    assert main([str(serve_config)]) == 2
    error = capsys.readouterr().err
    assert option in error
    assert "looks like a local path, but nothing is there" in error


def test_replica_numbers_under_deployments_are_in_the_plan(serve_config: Path) -> None:
    """`serve deploy` changes them without replacing engines; a change of `args` replaces all."""
    application(serve_config, deployments=[{"name": "Router", "num_replicas": 3}])
    app = check_file(serve_config)["specray"]
    assert (app.server.num_replicas, app.server.num_ingress_replicas) == (3, 1)
    assert "  3 engines, each a placement group" in plan_text(app)
    application(serve_config, deployments=[{"name": "Routers", "num_replicas": 3}])
    with pytest.raises(
        ConfigError, match=r"specray.deployments: unknown deployment 'Routers'; use Router, OpenAIIngress"
    ):
        check_file(serve_config)


def application(path: Path, **options: object) -> None:
    """Add options to the file's application."""
    document = yaml.safe_load(SERVE_CONFIG)
    document["applications"][0] |= options
    path.write_text(yaml.safe_dump(document))


def test_check_takes_the_flags_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "smollm2-135m-instruct", "--tp-size", "0"]) == 2
    assert "command line: specray.args.tp_size=0" in capsys.readouterr().err


def test_check_tells_what_this_machine_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["smollm2-135m-instruct", "--server-rank-cpus", "1000"]) == 0
    assert "warning: on this machine alone: an engine needs 1000.1 CPU on one node" in capsys.readouterr().err


def test_check_tells_which_options_of_a_drafter_need_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["smollm2-135m-instruct", "--device", "cpu", "--draft-cuda-ipc", "--draft-gpu-share", "0.3"]
    assert main([*flags, "--speculative-algorithm", "NGRAM"]) == 0
    expected = "draft.cuda_ipc and draft.gpu_share have no effect without a GPU; leave them out"
    assert f"warning: on this machine alone: {expected}" in capsys.readouterr().err
    assert main(flags) == 2
    assert "draft.cuda_ipc has no effect without a drafter" in capsys.readouterr().err
