"""`openjev-fast bench`, and what it shares with the benchmarks in `bench/`.

run: the modes of a checkpoint timed on requests, in turn where memory allows. budget: where a forward's time goes.
timing, record: the timer, and the record of where a run was made. report, plots: the result as text and as pictures.
"""
