"""The Serve application that `serve run` imports, built from its arguments.

The ingress's queue limit is set here, because Serve's default is unbounded. Routers limit their queues themselves.
"""

import logging
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from cluster.autoscaling import serve_autoscaling
from cluster.config import AppConfig
from cluster.engine.node_resources import check_node_resources
from cluster.engine.placement import bundles, decide_device, strategy, uses_gpus
from cluster.engine.router import Router
from cluster.http_port import check_http_port
from cluster.ingress.deployment import OpenAIIngress
from cluster.process_settings import LARGE_MESSAGES, ONE_LOOP
from specray.models.files import is_here
from specray.server.monitoring.tracing import check_exporter
from specray.spec_decode import check_speculative

logger = logging.getLogger("ray.serve")

ROUTER = "Router"
ADDRESSED_ROUTER: Any = "cluster.ingress.addressing.AddressedRouter"  # Ray types its options as dictionaries
ROUTER_MAX_CALLS = 4096  # short calls and one stream per ingress replica
MIN_ENGINES = 16  # for the ingress's limits: Serve may scale beyond the plan, but never changes them
INGRESS_SLACK = 256  # requests that are refused or answered without an engine
SHUTDOWN_POLL_S = 0.5  # interval at which a stopping replica checks for unfinished requests; Serve's default is 2
# Of ingresses and routers. The ranks own the threads that compute.
HOST_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"} | ONE_LOOP | LARGE_MESSAGES


def build(args: AppConfig) -> Application:
    """The application for a configuration, which Serve has validated against the annotation.

    Files that are on this machine are checked first: Serve reports an error here at once, but tries to start a replica
    three times. So are the HTTP port, which a second Serve would silently share, and the resources of the cluster's
    nodes, for which Ray would wait without end.
    """
    args = decide_device(args)
    check_speculative(args.speculative)
    check_exporter(args.server.otlp_traces_endpoint)
    check_http_port()
    check_node_resources([args])
    if not absent_models(args):
        from specray.spec_decode.model_files import check_model_files  # loads torch, which takes seconds

        uses_defaults = args.server.generation_config == "auto"
        check_model_files(args.engine, uses_sampling_defaults=uses_defaults, has_draft_process=args.has_draft_actor)
    return application(args)


def absent_models(config: AppConfig) -> list[str]:
    """The models of an application that are not on this machine."""
    drafters = [drafter.draft_model_path for drafter in config.speculative.members.values()]
    return [model for model in (config.model, *drafters) if model is not None and not is_here(model)]


def application(args: AppConfig) -> Application:
    """The application for a configuration whose files are checked, or are on other machines."""
    args = decide_device(args)
    check_speculative(args.speculative)
    if args.trust_remote_code:
        logger.warning("accepted without effect: trust_remote_code=True: code from a checkpoint is never run")
    return _ingress(args).bind(args, _router(args).bind(args))


def _ingress(config: AppConfig) -> serve.Deployment:
    """Allows more open requests than the engines admit, so that the excess gets our 429 instead of Serve's 503."""
    admitted = config.max_running_requests + config.max_queued_requests  # by one engine
    max_open = max(config.max_replicas, MIN_ENGINES) * admitted + INGRESS_SLACK
    return serve.deployment(
        name="OpenAIIngress",
        num_replicas=config.server.num_ingress_replicas,
        max_ongoing_requests=max_open,
        max_queued_requests=max_open,
        logging_config={
            "log_level": config.server.log_level.upper(),
            "enable_access_log": config.server.access_log,
        },
        ray_actor_options={
            "num_cpus": config.server.ingress_cpus,
            "runtime_env": {"env_vars": HOST_ENVIRONMENT},
        },
        graceful_shutdown_wait_loop_s=SHUTDOWN_POLL_S,
        graceful_shutdown_timeout_s=config.server.drain_s,
    )(OpenAIIngress)


def _number_of_engines(config: AppConfig) -> dict[str, Any]:
    if config.autoscaling.enabled:
        return {"autoscaling_config": serve_autoscaling(config.autoscaling)}
    return {"num_replicas": config.server.num_replicas}


def _router(config: AppConfig) -> serve.Deployment:
    return serve.deployment(
        name=ROUTER,
        **_number_of_engines(config),
        request_router_config=RequestRouterConfig(
            request_router_class=ADDRESSED_ROUTER, request_router_kwargs={"deployment": ROUTER}
        ),
        max_ongoing_requests=ROUTER_MAX_CALLS,
        logging_config={
            "log_level": config.server.log_level.upper(),
            "enable_access_log": False,  # requests are those of the ingress
        },
        ray_actor_options={
            "num_cpus": config.server.router_cpus,
            "runtime_env": {"env_vars": HOST_ENVIRONMENT},
        },
        placement_group_bundles=bundles(config, uses_gpus(config)),
        placement_group_strategy=strategy(config),
        health_check_period_s=1.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_wait_loop_s=SHUTDOWN_POLL_S,
        graceful_shutdown_timeout_s=config.server.drain_s,  # ingresses disconnect once their requests are finished
    )(Router)
