"""Agreement between ranks and reports of failures: the job's store, agreement, liveness, records."""
