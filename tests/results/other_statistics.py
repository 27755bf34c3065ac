"""What ``compare`` could have used: other statistics, for all simulated comparisons at once (one a row)."""

import numpy
import scipy


def means(samples):
    """Location and what each sample adds to it: of the mean, its deviations."""
    centre = samples.mean(axis=1)
    return centre, samples - centre[:, None]


def of_samples(deviations):
    """Variance of a sample that stands for its neighbours too, and degrees of freedom: as if all were independent."""
    count = deviations.shape[1]
    return (deviations**2).sum(axis=1) / (count - 1), count - 1


def of_effective_samples(deviations):
    """As many independent samples as an estimated autocorrelation leaves."""
    count = deviations.shape[1]
    lag = (deviations[:, 1:] * deviations[:, :-1]).sum(axis=1) / (deviations**2).sum(axis=1)
    lag = numpy.clip((lag + 1 / count) / (1 - 4 / count), 0, 0.95)
    factor = numpy.minimum((1 + lag) / (1 - lag), count / 2)
    return deviations.var(axis=1, ddof=1) * factor, count / factor - 1


def of_cosines(deviations):
    """By the slowest cosines (Lazarus, Lewis, Stock and Watson 2018), as ``compare`` once did."""
    count = deviations.shape[1]
    degrees = max(1, round(0.4 * count ** (2 / 3)))
    angles = numpy.pi / count * numpy.outer(numpy.arange(count) + 0.5, numpy.arange(1, degrees + 1))
    return ((deviations @ numpy.cos(angles)) ** 2).mean(axis=1) * 2 / count, degrees


def welch(location, noise):
    """P-values of ``location``'s logarithm, with Welch's degrees of freedom, and whether B's is larger."""

    def p_values(a, b):
        centres, variances, degrees = [], [], []
        for samples in (a, b):
            centre, deviations = location(samples)
            variance, freedom = noise(deviations)
            centres.append(centre)
            variances.append(variance / samples.shape[1] / centre**2)
            degrees.append(freedom)
        total = variances[0] + variances[1]
        freedom = total**2 / (variances[0] ** 2 / degrees[0] + variances[1] ** 2 / degrees[1])
        distance = numpy.log(centres[1] / centres[0])
        return 2 * scipy.special.stdtr(freedom, -numpy.abs(distance) / numpy.sqrt(total)), distance > 0

    return p_values


def mann_whitney(a, b):
    """As if all samples were independent."""
    return scipy.stats.mannwhitneyu(a, b, axis=1).pvalue, numpy.median(b, axis=1) > numpy.median(a, axis=1)


STATISTICS = {
    "ranks, all samples independent": mann_whitney,
    "means, all samples independent": welch(means, of_samples),
    "means, effective samples": welch(means, of_effective_samples),
    "means, cosines": welch(means, of_cosines),
}
