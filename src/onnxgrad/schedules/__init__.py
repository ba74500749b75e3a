"""Learning rates: by step (`base`, `curves`, `compose`, `plateau`) and by epoch (`epochwise`)."""
