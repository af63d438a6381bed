"""``h2o-serve``: many endless conversations on one model, behind the interface of OpenAI. Nothing here prints."""
