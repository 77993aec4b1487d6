"""What an ingress knows of the engines: which one serves a request, how many run, and how a lost one is replaced."""
