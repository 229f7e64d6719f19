"""GGUF models evaluated by llama.cpp, through the binding llama-cpp-python."""
