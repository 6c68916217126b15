"""A zoo of architectures: each is trained by a pipeline of four stages and by eager torch, and compared.

``model_case`` says what a model in the zoo is, ``layers`` and ``tiny_transformers`` make models,
``comparison`` compares one, ``refusal_causes`` groups what is refused, ``process_pool`` runs many, and
``report`` writes the tables of docs/models.md. The models themselves are in the files of ``families``, and
``huggingface`` tries every architecture of the transformers library.
"""
