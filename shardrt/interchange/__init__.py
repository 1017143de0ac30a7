"""Other programs' files: torch's, torch.distributed.checkpoint's and Hugging Face's, read and written."""
