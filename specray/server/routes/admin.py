"""Admin routes: report the engines' drafters, and replace, add, promote or drop them while serving.

Access control lives in `access.auth`; `specray.server.routing.rollout` brings all engines to the same drafter.
"""

import json
import logging
from typing import Any

from fastapi import FastAPI, Request
from pydantic import ValidationError

from specray.config import SpeculativeConfig
from specray.errors import ConfigError
from specray.server import OPERATOR_LOG
from specray.server.access.auth import ADMIN
from specray.server.config import ServingConfig
from specray.server.errors import ApiError, from_validation
from specray.server.routes.drafter_actions import changed_group, parse_action
from specray.server.routing.rollout import DrafterRollout

Json = dict[str, Any]

logger = logging.getLogger(OPERATOR_LOG)


def add_admin_routes(app: FastAPI, config: ServingConfig, rollout: DrafterRollout) -> None:
    @app.get(f"{ADMIN}drafter")
    async def drafter() -> Json:
        _check_replaceable(config)
        return {"replicas": await rollout.report()}

    @app.post(f"{ADMIN}drafter")
    async def replace_drafter(request: Request) -> Json:
        _check_replaceable(config)
        body = parsed(await request.body())
        if "action" in body:
            action = parse_action(body)

            def changed(now: SpeculativeConfig) -> SpeculativeConfig:
                return new_options(config, changed_group(now, action, config.speculative.shared_options))

            await rollout.change(changed)
        else:
            await rollout.replace(new_options(config, body))
        options = rollout.speculative.model_dump(exclude_defaults=True)
        logger.info("replaced the engines' drafter: %s", options or "none")
        return {"replicas": await rollout.report()}


def parsed(body: bytes) -> Json:
    """A whole `speculative` group, or an action. ApiError if the body is neither."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict) or not fields.keys() & {"algorithm", "drafters", "action"}:
        raise ApiError(
            400,
            "the body must be a JSON object with `action` (add, promote, shadow, drop), or with `algorithm` or "
            "`drafters`; algorithm null turns drafting off",
            "algorithm",
        )
    return fields


def new_options(config: ServingConfig, group: Json) -> SpeculativeConfig:
    """The complete new `speculative` group of this application. ApiError if an option is invalid."""
    try:
        speculative = type(config).model_validate(config.model_dump() | {"speculative": group}).speculative
        config.speculative.check_successor(speculative)  # every engine checks it again
    except ValidationError as error:
        raise _error(error) from None
    except ConfigError as error:
        raise ApiError(400, str(error)) from None
    return speculative


def _error(error: ValidationError) -> ApiError:
    cause = error.errors()[0].get("ctx", {}).get("error")
    return ApiError(400, str(cause)) if isinstance(cause, ConfigError) else from_validation(error.errors())


def _check_replaceable(config: ServingConfig) -> None:
    if config.fixed_drafter:
        raise ApiError(409, config.fixed_drafter)
