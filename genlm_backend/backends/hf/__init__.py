"""The Hugging Face backend: causal language models of transformers."""
