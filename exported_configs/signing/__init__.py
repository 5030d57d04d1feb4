"""Who vouches for a profile: detached OpenSSF signatures."""
