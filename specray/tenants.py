"""A tenant's texts have a namespace of their own: the tenant's name and a line break come first."""


def tenant_scoped(tenant: str, text: str) -> str:
    """`text` in the tenant's namespace. A tenant's name has no newline, so texts of two tenants never collide."""
    return f"{tenant}\n{text}"


def tenant_of(text: str) -> str:
    """The tenant whose namespace a text is in; empty outside of a server, where there are none."""
    tenant, newline, _ = text.partition("\n")
    return tenant if newline else ""
