"""The five systems as their reports describe them: sick forms, with the interface of the healthy ones."""
