"""Tool calls in generated text: one scanner per format; `formats` is the table of them."""
