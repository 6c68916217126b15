"""Training loops of other libraries, each in a module of its own: `import pipec` imports none of them."""
