"""GGUF models evaluated by llama.cpp, through its binding llama-cpp-python."""
