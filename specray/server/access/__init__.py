"""Who may call the server: keys, their tenants, and host names."""
