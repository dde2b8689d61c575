"""The ready-made models for folders of Hugging Face transformers: `hf:FOLDER` and `st:FOLDER`.

    language_model  `hf:`, a causal language model that steps
    sentence_model  `st:`, embeddings of sentences
    network         a causal language model of transformers: prefills and steps
    joined_cache    the keys and values of the texts that take steps together
    choosing        the next tokens, from the network's numbers
    encoder         an encoder of transformers, with pooling
    tokenizer       texts and tokens
    writing         a text that is generated: from its tokens to pieces
    order           what a request for a text asks for
    pooling         what a folder says of how an embedding is made
    grouping        which sequences are padded together
    source          a folder, or a name on the Hub

Only `network`, `joined_cache`, `choosing`, `encoder` and `tokenizer` import torch or transformers, which are
optional (the extra `transformers`). They are imported when a model is loaded.

Why: docs/decisions/0109.
"""
