"""One engine on Ray: the router replica with its step loop, and the actors of target ranks and drafters."""
