"""What an operator may do while the server serves: see the engines' drafters, and replace them.

Not here: whose key opens this (`auth`), and how all engines come to have the same drafter (`cluster.routing.drafting`).
"""

import json
import logging
from typing import Any

from fastapi import FastAPI, Request
from pydantic import ValidationError

from cluster.api.auth import ADMIN
from cluster.api.errors import ApiError, from_validation
from cluster.config import AppConfig
from cluster.routing.drafting import DrafterRollout
from specray.config import SpeculativeConfig
from specray.errors import ConfigError

Json = dict[str, Any]

logger = logging.getLogger("ray.serve")


def add_admin_routes(app: FastAPI, config: AppConfig, drafts: DrafterRollout) -> None:
    @app.get(f"{ADMIN}drafter")
    async def drafter() -> Json:
        _check_replaceable(config)
        return {"replicas": await drafts.report()}

    @app.post(f"{ADMIN}drafter")
    async def replace_drafter(request: Request) -> Json:
        _check_replaceable(config)
        speculative = new_options(config, await request.body())
        await drafts.replace(speculative)
        logger.info("the engines' drafter was replaced: %s", speculative.model_dump(exclude_defaults=True) or "none")
        return {"replicas": await drafts.report()}


def new_options(config: AppConfig, body: bytes) -> SpeculativeConfig:
    """The whole new group `speculative` for this application; ApiError for what can be seen to be wrong with it."""
    try:
        group = json.loads(body)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(group, dict) or "algorithm" not in group:
        raise ApiError(400, "the body must be a JSON object with `algorithm`; null turns drafting off", "algorithm")
    try:
        return AppConfig.model_validate(config.model_dump() | {"speculative": group}).speculative
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> ApiError:
    cause = error.errors()[0].get("ctx", {}).get("error")
    return ApiError(400, str(cause)) if isinstance(cause, ConfigError) else from_validation(error.errors())


def _check_replaceable(config: AppConfig) -> None:
    if not config.replaces_drafters:
        raise ApiError(
            409,
            f"draft.placement={config.draft.placement}: the drafter is a part of the target's process and ends with "
            "it; deploy with draft.placement=colocated, and drafters can be replaced from then on",
        )
