"""What every experiment uses: command lines, launching, results, the machine it ran on."""
