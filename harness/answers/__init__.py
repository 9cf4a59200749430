"""Answers in print: tables, sentences and pages of what rows and studies hold. Nothing is run or estimated here."""
