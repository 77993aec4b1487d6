"""`make clients`: published clients, each in an environment of its own, against a server with the embedded model."""
