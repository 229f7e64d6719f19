"""Engine: requests that come and go, with a queue of results for each."""
