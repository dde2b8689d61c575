"""`carpool demo`: a documentation search on this machine, with measured throughput and checked results.

    command           `carpool demo`: the stack, and another thread for the scenario
    scenario          what the demo sends, prints and checks, step by step
    measure           timed requests, dispatch reasons, compared answers
    report            how these are printed
    writing           texts that are written beside each other
    whole_texts       the same in batches, for comparison
    listening         microphones, in which a model hears where somebody speaks

Ready-made models:

    docsearch         semantic search in the Python documentation
    docsearch_corpus  the passages, and queries
    docsearch_index   terms and passages as vectors of one space
    docsearch_words   the terms of a text
    writer            a small language model that continues a text
    writer_network    its network, and the cache of that
    writer_gradient   derivatives of its loss by its weights
    writer_training   trains it
    voice_activity    is somebody speaking?
    voice_sounds      sounds for microphones
"""
