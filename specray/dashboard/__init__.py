"""What a running cluster shows: panels and alerts as data, and the files and pictures made of them."""
