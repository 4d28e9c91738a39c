"""The one main controller: who is there, what each session issued, which node gets what. Decisions and a shell."""
