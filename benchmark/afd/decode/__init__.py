"""Parts of `bench_decode.py`: configurations, the ranks that they run on, and what is made of a run."""
