"""Routes that generate no text: admin, engine, tokenizer and page."""
