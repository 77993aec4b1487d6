"""Admin routes: report the engines' drafters, and replace them while serving.

Access control lives in `auth`; `cluster.routing.rollout` brings all engines to the same drafter.
"""

import json
import logging
from typing import Any

from fastapi import FastAPI, Request
from pydantic import ValidationError

from cluster.api.auth import ADMIN
from cluster.api.errors import ApiError, from_validation
from cluster.config import AppConfig
from cluster.routing.rollout import DrafterRollout
from specray.config import SpeculativeConfig
from specray.errors import ConfigError

Json = dict[str, Any]

logger = logging.getLogger("ray.serve")


def add_admin_routes(app: FastAPI, config: AppConfig, rollout: DrafterRollout) -> None:
    @app.get(f"{ADMIN}drafter")
    async def drafter() -> Json:
        _check_replaceable(config)
        return {"replicas": await rollout.report()}

    @app.post(f"{ADMIN}drafter")
    async def replace_drafter(request: Request) -> Json:
        _check_replaceable(config)
        speculative = new_options(config, await request.body())
        await rollout.replace(speculative)
        logger.info("replaced the engines' drafter: %s", speculative.model_dump(exclude_defaults=True) or "none")
        return {"replicas": await rollout.report()}


def new_options(config: AppConfig, body: bytes) -> SpeculativeConfig:
    """The complete new `speculative` group of this application. ApiError if the body or an option is invalid."""
    try:
        group = json.loads(body)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(group, dict) or "algorithm" not in group:
        raise ApiError(400, "the body must be a JSON object with `algorithm`; null turns drafting off", "algorithm")
    try:
        speculative = AppConfig.model_validate(config.model_dump() | {"speculative": group}).speculative
        config.speculative.check_successor(speculative)  # every engine checks it again
    except ValidationError as error:
        raise _error(error) from None
    except ConfigError as error:
        raise ApiError(400, str(error)) from None
    return speculative


def _error(error: ValidationError) -> ApiError:
    cause = error.errors()[0].get("ctx", {}).get("error")
    return ApiError(400, str(cause)) if isinstance(cause, ConfigError) else from_validation(error.errors())


def _check_replaceable(config: AppConfig) -> None:
    if not config.replaces_drafters:
        raise ApiError(
            409,
            f"draft.placement={config.draft.placement}: the drafter runs in the target's process and cannot be "
            "replaced; deploy with draft.placement=colocated or separate to replace drafters while serving",
        )
