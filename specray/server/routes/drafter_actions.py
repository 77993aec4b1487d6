"""Changes to the drafters of a running server, as pure functions: from one `speculative` group to the next.

A server that was started with a single drafter gets several by the first change; the single one is named after its
algorithm. The actions and their fields are documented in docs/serving.md.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from specray.config import DrafterName, DrafterOptions, Options, ShadowOptions, SpeculativeConfig
from specray.server.errors import ApiError, from_validation

Json = dict[str, Any]


class Add(Options):
    """Load one more drafter; with `shadow_share`, as the shadow of the others."""

    action: Literal["add"]
    drafter: Json  # an entry of speculative.drafters, which validates it
    shadow_share: float | None = None
    promotes: bool = False  # see ShadowOptions


class Promote(Options):
    """Give a drafter to all new requests that name none; null lets the bandit choose again.

    A shadow that is promoted is no longer a shadow.
    """

    action: Literal["promote"]
    name: DrafterName | None


class Shadow(Options):
    """Measure a drafter beside the others; null ends that."""

    action: Literal["shadow"]
    name: DrafterName | None
    share: float = ShadowOptions().share
    promotes: bool = False


class Drop(Options):
    """Remove a drafter. Requests that have it go on with another one."""

    action: Literal["drop"]
    name: DrafterName


Action = Annotated[Add | Promote | Shadow | Drop, Field(discriminator="action")]
_ACTION: TypeAdapter[Add | Promote | Shadow | Drop] = TypeAdapter(Action)


def parse_action(body: Json) -> Add | Promote | Shadow | Drop:
    """ApiError if it is none."""
    try:
        return _ACTION.validate_python(body)
    except ValidationError as error:
        raise from_validation(error.errors()) from None


def changed_group(now: SpeculativeConfig, action: Add | Promote | Shadow | Drop, shared: Json) -> Json:
    """The `speculative` group after an action, not validated as a whole. ApiError if it names no drafter.

    `shared` are the shared options that the first drafter gets where drafting was turned off.
    """
    group = _several(now) if now.has_drafter or not isinstance(action, Add) else shared | {"drafters": []}
    if isinstance(action, Add):
        group["drafters"] = [*group["drafters"], action.drafter]
        if action.promotes and action.shadow_share is None:
            raise ApiError(400, "promotes has no effect without shadow_share, such as 0.05", "promotes")
        if action.shadow_share is not None:
            name = action.drafter.get("name")
            group["shadow"] = {"drafter": name, "share": action.shadow_share, "promotes": action.promotes}
        return group
    names = [drafter["name"] for drafter in group["drafters"]]
    if action.name is not None and action.name not in names:
        known = f"choose one of {', '.join(names)}" if names else "this server has none"
        raise ApiError(400, f"name={action.name!r} is not a drafter of this server; {known}", "name")
    if isinstance(action, Shadow):
        return group | {"shadow": action.model_dump(exclude={"action", "name"}) | {"drafter": action.name}}
    if group.get("shadow", {}).get("drafter") == action.name:
        group.pop("shadow", None)
    if isinstance(action, Promote):
        return group | {"default_drafter": action.name}
    if len(names) == 1:
        raise ApiError(
            400, f'name={action.name!r} is the only drafter; send {{"algorithm": null}} to turn drafting off', "name"
        )
    if group.get("default_drafter") == action.name:
        del group["default_drafter"]
    group["drafters"] = [drafter for drafter in group["drafters"] if drafter["name"] != action.name]
    return group


def _several(config: SpeculativeConfig) -> Json:
    """The group with `drafters`, which may be empty, and without the options of a single drafter."""
    group = config.model_dump(exclude_defaults=True)
    if config.algorithm is None:
        return group | {"drafters": list(group.get("drafters", ()))}
    [name] = config.members
    own = {option: group.pop(option) for option in list(group) if option in DrafterOptions.model_fields}
    return group | {"drafters": [{"name": name, **own}]}
