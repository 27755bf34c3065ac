"""Parts that pay for the 8B step alone (``docs/board.md``): a block as one node, measured algorithms of products."""
