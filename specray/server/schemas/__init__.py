"""Fields of request bodies that several endpoints share."""
