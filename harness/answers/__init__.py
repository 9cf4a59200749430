"""Printed answers: tables, sentences and pages that show stored rows and studies. Nothing is run or estimated here."""
