"""Several evaluators of one model, each context on the one that answers it soonest."""
