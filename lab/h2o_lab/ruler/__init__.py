"""Tasks after RULER (arXiv 2404.06654), made from code alone, as single questions and as conversations."""
