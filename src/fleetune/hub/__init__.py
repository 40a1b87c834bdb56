"""What a finished run gives others: a card that tells how it came about, and its upload to the Hugging Face hub."""
