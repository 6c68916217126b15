"""A zoo of architectures: each is trained by a pipeline of four stages and by eager torch, and compared.

``case`` says what a model in the zoo is, ``tiny`` makes small configurations of library models, ``trial``
compares one, ``causes`` groups what is refused, ``processes`` runs many, and ``report`` writes the tables of
docs/models.md. The models themselves are in the files of ``families``, and ``huggingface`` tries every
architecture of the transformers library.
"""
